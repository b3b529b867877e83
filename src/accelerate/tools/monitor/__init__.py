"""The live view of a run, from the files in its folder.

- `reading`: the files of a run, followed while they grow; `snapshot`: the run as it is now, as one `document`.
- `serve`: the page; `terminal`: the same as text; `export`: the page as a file or a picture.
"""
