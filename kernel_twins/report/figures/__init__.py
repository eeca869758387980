"""The figures: each ladder's climb, speed against size and case by case, the roofline, the sampled cases.

``render`` and what draws for it need matplotlib, which is installed for developers; ``groups``, ``roofs`` and
``words`` do not.
"""
