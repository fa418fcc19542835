"""A whole comparison in a quarter hour of one GPU, with torch, numpy and two prepared files alone.

`prepare` turns a study into a folder on a machine with the full environment; everything else here runs
where neither DeepSpeed nor pydantic nor a YAML reader is installed. `scripts/gpu_quarter_hour.py` is
the command, `docs/gpu.md` the manual.
"""
