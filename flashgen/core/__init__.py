"""Pure values: workloads, devices, configs, records, settings and errors.

Nothing in this room imports torch, triton, jinja2, optuna or sqlalchemy.
"""
