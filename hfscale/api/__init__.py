"""Build a model that trains: check arguments, plan, load weights, install the layout's features; attach and merge
adapters.
"""
