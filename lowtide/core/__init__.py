"""The words that all parts share: fate, pattern, rules, recipe, profile, plan, and a plan as text.

Start at `plan.py`: a `Plan` is what the part that decides hands to the part that carries out.
May import: `errors` and `units`. All of it is frozen data that goes to JSON and comes back the same.
Must not: import torch or numpy; decide, measure or carry out anything.
"""
