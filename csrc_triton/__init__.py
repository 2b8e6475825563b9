"""Triton kernels of distmon: the layout of a row of statistics, and the kernels that fill rows.

No module here logs, communicates or imports `distmon`.
"""
