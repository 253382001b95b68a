"""Vectors (embeddings) and labels of texts, and scores of pairs of texts: a prompt that generates nothing and ends with
the vector of its last token, or with logits after it.

Start with vectors.py, which computes a call's vectors and scores as the checkpoint specifies.

    vectors.py         vectors of texts, truncated and normalized, their labels, and scores of pairs
    text_call.py       the texts of one call as requests of the gateway: validated, then run
    text_bodies.py     fields that the bodies of all pages share
    pooling_rows.py    rows of a text that its vector is pooled from
    pooling_files.py   a checkpoint's sentence-transformers files: pooling, normalization, prompts
    label_forms.py     names of a classifier's labels, and the activation of its logits
    pair_forms.py      scoring of pairs: by cosines, by a head with one label, by two tokens
    pooling_pages.py   routes and handlers of the HTTP port
    embeddings_form.py bodies of /v1/embeddings, in OpenAI's format
    classify_form.py   bodies of /v1/classify, in vLLM's format
    rerank_forms.py    bodies of /v1/rerank and /v1/score, in the formats of vLLM, Jina and Cohere
    text_servicer.py   gRPC's Embed and Score

The vector is a row of a worker's step (``StepBatch.pooled``), a prefill worker's if there is one. Planning, prefix
hits, replays, quotas and priorities are those of all requests.
"""
