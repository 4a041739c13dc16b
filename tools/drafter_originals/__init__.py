"""How each original drafter is run to make a golden fixture; `tools/golden_drafters.py` says what that is."""
