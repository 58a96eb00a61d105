"""A function for jobs, called by prices.sh: what is imported here is imported once per worker, not once per job."""

from decimal import ROUND_HALF_UP, Decimal, InvalidOperation

VAT = {"de": Decimal("0.19"), "fr": Decimal("0.20"), "jp": Decimal("0.10")}


def main(arguments: list[str]) -> int | None:
    """`COUNTRY NET…`: print the prices with tax. The value returned is the exit code; none is 0."""
    country, *amounts = arguments
    if country not in VAT:
        print(f"no rate for {country!r}")
        return 2
    try:
        for net in map(Decimal, amounts):
            print((net * (1 + VAT[country])).quantize(Decimal("0.01"), ROUND_HALF_UP))
    except InvalidOperation as error:
        raise SystemExit(f"not an amount in {amounts}") from error
    return None
