"""What a run was: charts, a page about one run or many, a view in the terminal, pictures of data and predictions.

Run folders go in, HTML, SVG and terminal text come out. Start with `report`.
"""
