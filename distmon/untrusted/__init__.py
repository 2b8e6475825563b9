"""What comes from outside: files, documents and text that anybody may have written.

Everything here turns any bytes into plain values, an `OSError` or a `ValueError` with one clause
for the reader, in bounded memory and time. Readers add the name of the file and go on.
"""
