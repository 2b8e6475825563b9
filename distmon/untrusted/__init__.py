"""Input that is not trusted: files, documents and text of unknown origin.

Everything here turns any bytes into plain values, an `OSError` or a `ValueError` with one clause
for the reader, in bounded memory and time. Readers add the name of the file and go on.
"""
