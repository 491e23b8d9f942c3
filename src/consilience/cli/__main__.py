"""`python -m consilience.cli` is the command `consilience`."""

import sys

from consilience.cli.main import main

sys.exit(main())
