"""Training loops of others on compiled modules: what each assumes of a model, told otherwise in one class each.

Imports those libraries, which autopar does not need; nothing else of autopar imports this.
"""
