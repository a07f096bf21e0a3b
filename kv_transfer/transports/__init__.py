"""The ways to move bytes from one rank into another rank's pool, behind one interface (`base.py`)."""
