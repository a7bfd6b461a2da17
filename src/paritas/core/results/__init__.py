"""What a check found, as data: findings, verdicts and their wording. Questions have their own rows.

Nothing here imports torch. `paritas.core.numerics` computes the numbers.
"""
