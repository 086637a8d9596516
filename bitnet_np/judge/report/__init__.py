"""What is said of a verdict.

report.py    the Report, its tables and its heat map     detail.py    worst numbers and errors by position, on request
html.py      the report as one HTML file                 pictures.py  the report as pictures
ci.py        verdicts for continuous integration           text.py      the report as text
"""
