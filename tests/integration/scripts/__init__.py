"""The scripts of horovodrun_scripts/: the commands they print, their errors, and real trainings with them."""
