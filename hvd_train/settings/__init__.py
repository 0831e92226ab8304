"""The settings of a run in eight groups, one file each: frozen dataclasses that check themselves when they are made.

A field's type and default are those of its flag, the text below it is the flag's help, and `__post_init__` refuses
values that cannot be. A setting that concerns two groups is checked in `config.Config`, which holds one of each.
Start with `fields`, then `schedule`.
"""
