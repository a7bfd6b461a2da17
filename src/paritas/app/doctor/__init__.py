"""The checks of `paritas doctor`: does paritas work on this machine, with this torch?"""
