"""What is said of a verdict.

report.py    the Report, its tables and its heat map     text.py      the report as text
html.py      the report as one HTML file                 pictures.py  the report as pictures
ci.py        verdicts for continuous integration
"""
