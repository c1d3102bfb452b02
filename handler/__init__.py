from models import torchvision_alone

torchvision_alone.arrange()
