"""Other systems' files and names: Ascend's graph engine, torchair, msit, msprobe, SGLang."""
