"""`python -m controlplane.cli`: the same as `tandem`."""

import sys

from controlplane.cli import main

sys.exit(main())
