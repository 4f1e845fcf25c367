"""The compiled loop that packs, sends, receives and unpacks the chunks of many transfers without the GIL, and its
copies.

It knows nothing of Python objects: programs and slots are records (`records`), libraries are addresses of C functions.
Filling the records, and their meaning to a connector, are the caller's business.
"""
