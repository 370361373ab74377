"""An answer that is JSON of a given schema, whatever the model: python examples/structured_output.py [URL]"""

import json
import sys

from mstar.client import Client, ClientError

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "country": {"type": "string", "maxLength": 30},
        "size": {"enum": ["small", "large"]},
        "has_river": {"type": "boolean"},
    },
    "required": ["name", "country", "size", "has_river"],
    "additionalProperties": False,
}


def main(url: str = "http://127.0.0.1:8000") -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    with Client(url) as client:
        answer = client.chat("Describe Paris.", response_format=form, temperature=0, max_tokens=160)
    city = json.loads(answer.text)
    print(f"{city['name']} in {city['country']} is {city['size']}; a river: {city['has_river']}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ClientError as error:
        sys.exit(str(error))
