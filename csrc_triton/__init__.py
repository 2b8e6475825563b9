"""Device side of distmon: the layout of a statistics row and the kernels that fill it.

Nothing here logs, communicates or imports `distmon`.
"""
