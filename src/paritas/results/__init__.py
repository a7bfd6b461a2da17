"""What a check found, as data: findings, verdicts, the reports of each feature, and their wording.

Nothing here imports torch. `paritas.numerics` computes the numbers.
"""
