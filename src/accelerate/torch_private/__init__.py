"""The private names of torch that this package uses, one file for each part of torch.

No other file uses such a name (``tests/test_architecture.py``). Each name is checked against the newest torch (``make
versions``). If the installed torch lacks one, the error says which torch to install.
"""
