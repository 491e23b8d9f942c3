"""The words of a verdict. A module of their own, which the help of the command line can import."""

AS_IS = "use as is"
CORRECTED = "use the corrected draws"
MCMC = "do not use: run MCMC"
MODEL = "do not use: revise the model"
