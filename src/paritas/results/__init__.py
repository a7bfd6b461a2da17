"""What a check found, as data: findings, verdicts, the reports of each feature, and their wording.

Nothing here imports torch. What computes the numbers lies above, in `paritas.numerics`.
"""
