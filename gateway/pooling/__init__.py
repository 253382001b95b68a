"""Makes vectors (embeddings) and labels of texts, and scores of pairs of texts: a prompt that generates nothing and
ends with the vector of its last token, or with logits after it.

Open first: vectors.py, which makes the vectors and scores of a call as the checkpoint says.

    vectors.py         vectors of texts, cut and normalized, their labels, and scores of pairs
    text_call.py       the texts of one call, as requests of the gateway: read, then run
    text_bodies.py     what the bodies of all pages have in common
    pooling_rows.py    which rows of a text make its vector
    pooling_files.py   what a checkpoint's sentence-transformers files say: pooling, normalization, prompts
    label_forms.py     how a classifier's labels are called, and how logits become probabilities
    pair_forms.py      how a checkpoint scores pairs: by cosines, by a head with a label, by two tokens
    pooling_pages.py   the pages of the HTTP port
    embeddings_form.py the bodies of /v1/embeddings, in OpenAI's form
    classify_form.py   those of /v1/classify, in vLLM's form
    rerank_forms.py    those of /v1/rerank and /v1/score, in the forms of vLLM, Jina and Cohere
    text_servicer.py   gRPC's Embed and Score

The vector itself is a row of a worker's step (``StepBatch.pooled``), a prefill worker's where there is one; planning,
prefix hits, replays, quotas and priorities are those of every request.
"""
