# SPDX-License-Identifier: Apache-2.0
"""A reward function as verl's users write them: the share of vowels."""


def share_of_vowels(text):
    return sum(text.count(c) for c in "aeiou") / max(1, len(text))


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return share_of_vowels(solution_str)
