"""The settings of a run in seven groups, one file each: frozen dataclasses that check themselves when they are made.

A field's type and default hold for its flag, and the text below it is the flag's help. `config.Config` holds one of
each group and checks what concerns two. Start with `fields`, then `schedule`.
"""
