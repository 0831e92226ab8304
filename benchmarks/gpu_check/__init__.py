"""A check of real GPUs, typed once: `make gpu-check`; docs/gpu-check.md says what it does and how to read its record.

__main__       the command line, and the stages one after another
findings       what a stage finds: verdicts and figures
record         all findings in one file, whole at every moment, and the table on the terminal
machine        which GPUs there are, and how many ranks they take
site           where the stages work: commands with a limit of time, their output in files
networks       small networks that the stages train
jobs/          programs that ranks run for a stage
stages/        a module for each stage
"""
