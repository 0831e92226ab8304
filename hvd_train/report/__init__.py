"""What a run was: charts, a page about one run or many, a view in the terminal, pictures of data and predictions.

Run folders go in; HTML, PNG and terminal text come out. Start with `report`, which composes the page: `overview`,
`timeline`, `scaling` and `confusion` are its sections, `page` and templates/ its pieces. `curves` says what charts
there are, `charts` what a chart is, `drawing` and `ticks` draw it. `predictions` and `samples` need torch, the rest
does not.
"""
