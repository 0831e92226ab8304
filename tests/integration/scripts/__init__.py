"""The scripts of horovodrun_scripts/."""
