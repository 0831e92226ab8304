"""What a run was: a page about one run or many, a view in the terminal, pictures of data.

Start with `report`, which composes the page; `page` and templates/ hold its pieces. `images` needs torch.
"""
