"""The tasks, requests and numbers of lm-evaluation-harness, as the evaluator `lm_eval` uses them."""
