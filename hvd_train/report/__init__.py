"""What a run was: a page about one run or many, and a view in the terminal. No torch.

Start with `report`, which composes the page; `page` and templates/ hold its pieces.
"""
