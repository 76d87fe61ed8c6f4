"""What lm-eval's `local-completions` finds out: log-likelihoods of texts, whole and rolling, and answers.

    pip install "lm-eval[api]" transformers
    looplane serve --model DIR &
    python3 deploy/clients/lm_eval_client.py http://127.0.0.1:8000 DIR

A task is run by `lm_eval --model local-completions --model_args base_url=http://127.0.0.1:8000/v1/completions,\
model=NAME,tokenizer=DIR --tasks arc_easy`, which fetches its texts.
"""

import sys
from pathlib import Path

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

url, directory = sys.argv[1] + "/v1/completions", sys.argv[2]
model = LocalCompletionsAPI(base_url=url, model=Path(directory).name, tokenizer=directory, num_concurrent=4)


def ask(kind: str, *arguments) -> list:
    return getattr(model, kind)([Instance(kind, {}, of, index) for index, of in enumerate(arguments)])


right, wrong = ask("loglikelihood", ("The capital of France is", " Paris"), ("The capital of France is", " London"))
assert right[0] > wrong[0], (right, wrong)
print("loglikelihood:", right, wrong)
print("loglikelihood_rolling:", ask("loglikelihood_rolling", ("The quick brown fox jumps over the lazy dog.",)))
print("generate_until:", ask("generate_until", ("One, two, three,", {"until": ["."], "max_gen_toks": 20})))
