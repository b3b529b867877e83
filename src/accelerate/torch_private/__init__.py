"""The private names of torch that are used, one file for each part of torch.

No other file names such a thing (``tests/test_architecture.py``), each is compared with the newest torch
(``make versions``), and where an installed torch lacks one, the error says which torch to install.
"""
