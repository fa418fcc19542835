"""What becomes of results: rows (data), statistics, tables and figures.

The package imports none of the project's other packages and no torch, so that stored results can
be read on any machine. Import the module that you need (``analysis.rows``, ``analysis.tables``);
scipy and matplotlib load inside the functions that use them.
"""
