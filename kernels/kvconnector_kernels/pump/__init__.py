"""The compiled pump: a loop without the GIL that packs, sends, receives and unpacks the chunks of many transfers.

It knows nothing of Python objects: programs and slots are rows of int64 arrays (`records`), libraries are addresses of
C functions. Filling the rows, and their meaning to a connector, are the caller's business.
"""
