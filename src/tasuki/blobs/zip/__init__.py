"""Result archives (ZIP). Imported by worker, client and agent.

writer.py   write an archive as a stream; extract one
reader.py   the rules that an archive and its names must keep, and its unpacking within limits
"""
