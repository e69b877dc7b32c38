"""The checks of the gate, one file each.

perplexity.py    perplexity on every corpus
divergence.py    KL divergence and agreement of the most likely token
weights.py       every group of weights against the baseline's
identity.py      tokenizer, template and special tokens against the baseline's
choice.py        multiple choice by likelihood, and answers that must be given exactly
answers.py       generated answers: worked sums, formats, SQL, code in the sandbox
long_context.py  perplexity by position in a long text
passkey.py       a number found again in a long text
repetition.py    looping texts beyond the baseline's
side_by_side.py  held-out prompts, first differing token

`judge.py` compares the answers to one task's items.
"""
