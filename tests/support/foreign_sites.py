"""Headers of requests that a web page of another site causes, and of those that it does not; for every HTTP listener."""

FOREIGN = [
    {"Host": "rebind.evil.example"},
    {"Host": "127.0.0.1.evil.example:7090"},
    {"Host": "10.0.0.1:7090"},
    {"Host": "[::1].evil.example"},
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Host": "rebind.evil.example", "Origin": "http://rebind.evil.example", "Sec-Fetch-Site": "same-origin"},
]
OWN = [
    {"Host": "localhost"},
    {"Host": "LocalHost.:7090"},
    {"Host": "[::1]:7090"},
    {"Host": "127.0.0.1:7090", "Origin": "http://127.0.0.1:7090", "Sec-Fetch-Site": "same-origin"},
    {"Host": "localhost:7090", "Sec-Fetch-Site": "none"},
]
