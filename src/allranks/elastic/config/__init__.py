"""The job's one YAML file: read, checked as a whole, typed.

config = load_config("job.yaml")          # raises ConfigurationError with every problem in it
result = validate_config("job.yaml")      # or a dict, or an OmegaConf container; never raises for content
result.valid, result.errors, result.warnings
"""

from __future__ import annotations

from pathlib import Path

from allranks.checkpoint.stores import StoreSpec, reason_of
from allranks.checkpoint.stores.object_store import try_access
from allranks.elastic.config.schema import JobConfig, json_schema
from allranks.elastic.config.validate import ConfigCheck, ValidationResult
from allranks.errors import ConfigurationError, InputError, MissingExtra
from allranks.model.yaml_tree import ConfigProblem, Tree, read_tree

__all__ = [
    "ConfigProblem",
    "JobConfig",
    "ValidationResult",
    "check",
    "json_schema",
    "load_config",
    "validate_config",
    "validate_elastic_config",
    "validate_s3_access",
]
_CREDENTIALS = "Configure credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or attach an IAM role"


def check(source: object) -> ValidationResult:
    """Checks a YAML file (a path), YAML text (of several lines), a mapping or an OmegaConf container.

    Raises only when a file cannot be read.
    """
    return ConfigCheck(_tree(source)).run()


def validate_config(source: object, validate_s3: bool = False) -> ValidationResult:
    """Every problem of a configuration; with `validate_s3` the bucket is tried too."""
    found = check(source)
    if validate_s3 and found.config is not None and found.config.checkpoint.s3_bucket:
        section = found.config.checkpoint
        access = validate_s3_access(section.s3_bucket, section.s3_region, endpoint=section.s3_endpoint_url)
        found.errors += access.errors
        found.warnings += access.warnings
        found.valid = not found.errors
    return found


def validate_elastic_config(source: object) -> ValidationResult:
    """As `validate_config`, and never touches the network."""
    return validate_config(source)


def load_config(source: object) -> JobConfig:
    """The typed JobConfig, or a ConfigurationError that names every problem."""
    checked = check(source)
    if checked.config is None:
        name = source if isinstance(source, (str, Path)) else "the configuration"
        count = len(checked.errors)
        lines = "\n".join(f"  {problem}" for problem in checked.errors)
        raise ConfigurationError(f"{count} problem{'s' * (count > 1)} in {name}:\n{lines}")
    return checked.config


def _tree(source: object) -> Tree:
    if isinstance(source, str) and "\n" in source:
        return read_tree(source)
    if isinstance(source, (str, Path)):
        try:
            return read_tree(Path(source).read_text(encoding="utf-8-sig"))
        except UnicodeDecodeError as error:
            raise InputError(f"{source} is not UTF-8 text: {error}") from error
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read {source}: {getattr(error, 'strerror', None) or error}") from error
    if type(source).__module__.split(".")[0] != "omegaconf":
        return Tree(source)
    from omegaconf import OmegaConf, errors

    try:
        return Tree(OmegaConf.to_container(source, resolve=True))
    except errors.OmegaConfBaseException as error:
        first = str(error).splitlines()[0]
        return Tree(problems=[ConfigProblem(f"cannot resolve the container: {first}")])


def validate_s3_access(
    bucket: str, region: str | None = None, *, endpoint: str | None = None
) -> ValidationResult:
    """Lists, writes, reads and deletes one small object; an error names the IAM action that was refused.

    `endpoint` is the URL of an S3-compatible server (environment: AWS_ENDPOINT_URL). What cannot be found out for
    want of a library, credentials or network is a warning.
    """
    given = {"region": region or "", "endpoint": endpoint or "", "timeout_s": "15", "max_retries": "1"}
    url = bucket if "://" in bucket else f"s3://{bucket}"
    errors: list[str] = []
    try:
        for action, error in try_access(
            StoreSpec(url, {key: value for key, value in given.items() if value})
        ):
            message, fatal = _s3_problem(error, bucket, action)
            if not fatal:
                return ValidationResult(not errors, errors, [message])
            errors.append(message)
    except MissingExtra as error:
        return ValidationResult(warnings=[f"cannot check S3 bucket '{bucket}': {error}"])
    return ValidationResult(not errors, errors)


def _s3_problem(error: OSError, bucket: str, action: str) -> tuple[str, bool]:
    """(sentence, whether it is an error)."""
    message = reason_of(error)
    if isinstance(error, FileNotFoundError):
        return f"S3 bucket '{bucket}' does not exist. Create it: aws s3 mb s3://{bucket}", True
    if "NoCredentials" in message:
        return f"AWS credentials not configured, cannot check S3 bucket '{bucket}'. {_CREDENTIALS}", False
    if isinstance(error, PermissionError):
        text = f"Access denied to S3 bucket '{bucket}'. Check IAM permissions: {action} is missing, "
        return text + "or the credentials are wrong", True
    return f"Could not verify S3 bucket '{bucket}' ({action}): {message[:200]}", False
