"""A conversation of two turns: python examples/chat.py [URL]"""

import sys

from mstar.client import Client, ClientError


def main(url: str = "http://127.0.0.1:8000") -> None:
    with Client(url) as client:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        answer = client.chat(messages, temperature=0, max_tokens=64)
        print(answer.text)

        messages += [answer.message.as_request(), {"role": "user", "content": "And of Italy?"}]
        answer = client.chat(messages, temperature=0, max_tokens=64)
        print(answer.text)
        print(answer.usage)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ClientError as error:
        sys.exit(str(error))
