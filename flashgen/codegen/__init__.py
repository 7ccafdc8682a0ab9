"""From a specialization and a config to source, and from source to a compiled kernel.

No module here imports torch, so that compiling under another Triton needs only a venv with triton and jinja2.
"""
