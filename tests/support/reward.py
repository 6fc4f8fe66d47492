# SPDX-License-Identifier: Apache-2.0
"""A reward function as verl's users write them: the share of vowels."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return sum(solution_str.count(c) for c in "aeiou") / max(1, len(solution_str))
