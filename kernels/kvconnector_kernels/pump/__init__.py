"""The compiled pump: a loop without the GIL that packs, sends, receives and unpacks the chunks of many transfers.

It knows nothing of Python objects: programs and slots are rows of int64 arrays (`records`), libraries are addresses
of C functions. Who fills the rows and what they mean to a connector is the caller's business.
"""
