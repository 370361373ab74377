"""Which of some texts is closest to a question: python examples/embeddings.py [URL]"""

import sys

from mstar.client import Client, ClientError

TEXTS = ("The ferry leaves at nine.", "Bread needs flour, water and salt.", "The cat sleeps on the sofa.")
QUESTION = "How do I bake?"


def main(url: str = "http://127.0.0.1:8000") -> None:
    with Client(url) as client:
        question, *texts = client.embed([QUESTION, *TEXTS]).vectors
    for text, vector in zip(TEXTS, texts, strict=True):
        cosine = sum(a * b for a, b in zip(question, vector, strict=True))  # they have length 1
        print(f"{cosine:.3f}  {text}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ClientError as error:
        sys.exit(str(error))
