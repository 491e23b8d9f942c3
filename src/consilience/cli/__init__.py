"""The command line: its options, and what each command does. Imports everything else. Read main.py
first.
"""
