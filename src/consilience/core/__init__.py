"""What every other folder uses and that knows nothing of inference: the types that signatures
share, arrays on their way in, compilation, devices, files, processes, HTML. Imports nothing of
the package. Read types.py first.
"""
