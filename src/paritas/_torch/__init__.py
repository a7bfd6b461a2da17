"""The only place that touches torch's private APIs; each entry typed, with a canary test."""
